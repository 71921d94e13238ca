"""What wraps every route."""
