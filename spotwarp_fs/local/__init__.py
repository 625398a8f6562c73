"""What the node keeps: the LMDB map, sparse data files, the fsync journal, the cache directory."""
