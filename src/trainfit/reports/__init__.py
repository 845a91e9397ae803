"""Pages for people: reports, terminal pages, pictures. Nothing here measures or decides."""
