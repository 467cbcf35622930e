"""Files with the results of many runs, to copy or to commit.

`archive.py` packs run folders into a tar.gz file, `keep.py` writes a small results file per study
(`results_file.py` is its format), and `merge.py` adds the runs of either to a runs folder.
"""
