"""The only importer of pyfuse3."""
