"""One file a family: config, weight table, taps."""
