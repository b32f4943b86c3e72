"""What clients and operators call: streams (direct, and gRPC on data.sock), unary calls, the Admin service. Translates;
decides nothing.
"""
