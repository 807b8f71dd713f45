"""Views of a report, each made from its report.json alone."""
