"""The ``kvferry`` command. One file per subcommand; each is imported only when it is called."""
