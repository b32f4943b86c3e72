"""How the messages of a stream travel: over a socket of our own (`direct`), or through gRPC (`over_grpc`)."""
