"""gRPC: the data stream on data.sock and the operator's calls on admin.sock. Translates; decides nothing."""
