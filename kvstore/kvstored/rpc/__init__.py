"""The calls of clients and operators: streams (direct, and gRPC on data.sock), unary calls, the Admin service. This
package translates and decides nothing.
"""
