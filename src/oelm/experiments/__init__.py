"""The catalogue of the study, run folders, and the launchers that fill them."""
