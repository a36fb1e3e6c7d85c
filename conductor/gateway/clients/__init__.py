"""What operators promise and allow to each of the gateway's clients: objectives, rates, quotas."""
