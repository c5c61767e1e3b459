"""One document from result files: `read_source` for each file, `report` for all, `html.render` or `markdown.render`."""
