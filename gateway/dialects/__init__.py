"""Services that clients of other servers use already, on the same port as octavo.v1.

A dialect translates: its requests become octavo.v1 requests, its answers are made of the same pieces. Admission,
deadlines, errors and metrics are those of the gateway.
"""
