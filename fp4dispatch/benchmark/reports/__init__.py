"""Results of a benchmark: records, tables, comparisons and plots."""
