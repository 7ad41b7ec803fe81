"""What people see in a terminal or a browser. Law: reads, never decides."""
