"""What a rollout engine said, and whether the reference would have said it: the `engine` stage."""
