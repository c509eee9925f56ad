"""What happened to transfers and hand-offs: recorded as it happens, told when somebody asks.

``recorder`` keeps the last events in memory, ``events`` says what each means, ``timeline`` brings
the sides of one request together, ``story`` puts it in words.
"""
