"""The report as one HTML page, with its template."""
