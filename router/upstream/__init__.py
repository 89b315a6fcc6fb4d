"""The replicas' side: connections, header rules, and reading responses in passing."""
