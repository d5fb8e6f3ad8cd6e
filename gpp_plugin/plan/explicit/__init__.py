"""Plans whose stages somebody gave, and plans made asynchronous."""
