"""Results of Jobs: part files, statistics, manifest, downloads, and the end of a Job."""
