"""Services that existing clients of other servers call, on the same port as octavo.v1.

A dialect translates: its requests become octavo.v1 requests, and its answers are made from the same output pieces.
Admission, deadlines, errors and metrics are those of the gateway.
"""
