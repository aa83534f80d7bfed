"""How far an answer can be trusted: evidence, fusion of opinions, flags."""
