"""What happened, told once as a frozen event and rendered as metrics and log lines."""
