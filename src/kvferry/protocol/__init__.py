"""The wire protocol and the hand-off's state tables. Sans-IO: no socket, thread or clock in here.

``framing`` cuts a byte stream into messages, ``messages`` says what they are, ``session`` runs the
hello, the heart-beats and the closing of one connection, and ``handoff`` holds the offer and claim
tables. Time always comes in as an argument.
"""
