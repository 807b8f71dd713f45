"""What families are built of: blocks that read a config, make weight rules, taps and settings.  None of them names a model."""
