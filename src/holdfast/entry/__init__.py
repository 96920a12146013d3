"""The programs that worker processes run, and how they find the application."""
