"""The failover half: it enters the filesystem only through `spotwarp_fs.api`."""
