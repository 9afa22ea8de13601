"""What ``sync-core doctor`` finds amiss around the schemes: one file for each place it looks at."""
