"""Shows plans, predictions and runs to a person: tables, figures, a page, a trace."""
