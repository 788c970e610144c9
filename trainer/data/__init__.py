"""Token shards on disk, and the order in which a training reads them."""
