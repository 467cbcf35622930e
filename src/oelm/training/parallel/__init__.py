"""One run over several processes: data parallel or sharded."""
