"""Language models, as the routes under /v1 and the deployments share them."""
