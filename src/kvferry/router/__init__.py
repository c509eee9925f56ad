"""The OpenAI-compatible router: one request becomes a prefill leg and a decode leg.

Reading order: ``config`` (every setting), ``legs`` (what each leg is sent; pure), ``workers`` (who
is healthy and who is next; pure), ``upstream`` (one request to one worker), ``stream`` (bytes from
decode to the client), ``app`` (the handlers that join them).

It knows nothing of engines, blocks or transports: what prefill answers in ``kv_transfer_params``
is handed to decode byte for byte.
"""
