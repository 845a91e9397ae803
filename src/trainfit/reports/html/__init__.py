"""A report as one HTML file: geometry in Python, markup in page.html, looks in style.css."""
