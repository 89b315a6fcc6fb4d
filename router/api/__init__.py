"""The listeners: requests in, responses out, errors in the dialect of the path."""
