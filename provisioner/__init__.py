"""The failover half: not written yet; it enters the filesystem only through `spotwarp_fs.api`."""
