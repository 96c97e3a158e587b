"""What each path takes and gives. Thin: who may, what was asked, one call, the answer."""
