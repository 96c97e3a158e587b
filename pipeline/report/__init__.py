"""What a user gets: Markdown, HTML, figures, and the delivered folder."""
