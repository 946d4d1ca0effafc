"""What a parameter is: the base rules, what is said explicitly, and what plugins answer."""
