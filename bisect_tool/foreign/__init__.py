"""Other people's dumps: what each format is, read without running anything in it.  Format facts are public documents and code."""
