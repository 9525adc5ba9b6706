"""What every role shares: configuration, keys, blocks, the wire, membership, the model."""
