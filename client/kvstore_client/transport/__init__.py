"""The transports of a stream's messages: a socket of the client's own (`direct`), or gRPC (`over_grpc`)."""
