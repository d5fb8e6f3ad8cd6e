"""Messages between ranks: what each holds, where its rows come from, how it travels."""
