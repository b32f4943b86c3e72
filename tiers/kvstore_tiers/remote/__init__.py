"""A key-addressed tier on an existing store: Mooncake Store, Redis or Valkey, S3 and similar ones."""
