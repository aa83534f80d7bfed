"""From frames to pictures that look alike, scanner by scanner."""
