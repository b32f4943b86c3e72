"""The calls of clients and operators: streams (direct, and gRPC on data.sock), unary calls, the Admin service.
Translates; decides nothing.
"""
