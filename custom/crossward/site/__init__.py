"""What a hospital runs, with or without FLARE: trainer, vault, outbox, and the participant around them."""
