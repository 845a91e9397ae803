"""What people look at. Nothing here measures or decides."""
