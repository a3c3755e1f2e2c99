"""HTTP: authentication, quotas, requests and answers. The decisions are made in other packages."""
