"""The HTTP side: one router per resource, over the services. No decisions are made here."""
