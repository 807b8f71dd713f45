"""One file a family: its names, and the blocks it is put together from.  Every file here offers FAMILY."""
