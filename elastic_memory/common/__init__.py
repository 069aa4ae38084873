"""Small things that all parts share: files, locks, checksums, strict reading, names, defaults, environment."""
