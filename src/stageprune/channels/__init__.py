"""Online channel pruning: the prompt partitions each FFN's channels, every token picks candidates."""
